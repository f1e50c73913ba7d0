"""Published claims about checkpoint I/O, judged by our records (`iobench reproduce`)."""
