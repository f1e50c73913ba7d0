"""Published claims about checkpoint I/O, and what our records say of them (`iobench reproduce`)."""
