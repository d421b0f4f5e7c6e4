"""Calls every op and public function with wild arguments; see `python -m tests.fuzz --help`."""
