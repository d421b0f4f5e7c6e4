"""Debugging tools: check that packing is correct, and find what makes a step wait."""
