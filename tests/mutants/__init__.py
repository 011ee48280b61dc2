"""Planted faults: a test counts once it has been seen to fail.

Each ``*.toml`` here lists faults of one part of the package. An entry names the ``case`` (a number such as C03 from the
list of faults that real code has had, or words), the ``file`` inside ``mha_lessons/``, the edit (``find``, which must
occur exactly once, and ``replace``) and the ``test`` that must fail then. To plant one, add an entry: nothing else.
When a mutant survives, mend the test.
"""
