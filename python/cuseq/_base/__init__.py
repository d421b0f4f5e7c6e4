"""Checks of arguments, torch's modes, copies, fakes and the import, which all rooms use."""
