"""One small, working implementation of each contract kind, written from the contract alone: what
`octavo plugins new` writes, with the names of the new package.

Each module defines `Example...` and its options, and takes nothing from the built-in parts. They
are the second implementation that every contract is held against.
"""
