"""Arithmetic: what are the bits of this sum?

`deltafin.cext._math` multiplies matrices in the formats of the checkpoint, and computes everything between
them, in the one order that docs/arithmetic.md writes down: whatever the instruction set, the number of
threads or the number of rows, the bytes are the same. Arrays are C-contiguous and passed by position;
results are written in place; a wrong shape, type or layout is an exception. The room knows no model, no
file and no other room, and imports nothing.

The instruction set is chosen when `_math` is imported; DELTAFIN_ISA forces one (scalar, avx2, avx512,
neon), and DELTAFIN_GRAIN cuts all work into pieces of about that many outputs. Both are for tests.
"""
