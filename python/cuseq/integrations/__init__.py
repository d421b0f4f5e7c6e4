"""One module or package per framework.

Importing this package, or `cuseq`, imports none of them. Importing one of them changes nothing in
its framework but one message of an error; `cuseq.enable` does, and `transformers.register`.
"""
