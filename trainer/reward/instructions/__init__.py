"""Instructions whose following a program can check: one pure function per id (IFEval, arXiv 2311.07911)."""
