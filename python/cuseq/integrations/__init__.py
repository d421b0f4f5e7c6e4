"""One module or package per framework.

Importing this package, or `cuseq`, imports none of them. Importing one of them changes nothing in
its framework; `cuseq.enable` does, and `transformers.register`.
"""
