"""What every room stands on: checks of arguments, torch's modes, copies, fakes, the import."""
