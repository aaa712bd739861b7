"""Steps in proportion to the size of the parameters, and that size itself."""
