"""flashdsa inside other libraries: a module each, which is imported where the library is used."""
