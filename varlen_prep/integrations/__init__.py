"""One module per framework that can use this library's attention unchanged; none is imported until asked for."""
