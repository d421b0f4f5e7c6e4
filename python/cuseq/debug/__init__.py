"""Tools that look at a model from outside: is packing right in it, and what makes a step wait."""
