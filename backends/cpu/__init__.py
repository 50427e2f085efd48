"""Native CPU kernels: C files, compiled on first use, and the plugins made of them.

`build` compiles and caches; `native` is the library's Python face; `linear`, `attention`,
`elementwise` and `decoder` are what plugins use. Importing this imports neither torch nor a
compiler's output.
"""
