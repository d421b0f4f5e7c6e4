"""One module per framework. Importing a module registers cuseq with its framework; importing this
package, or `cuseq`, imports none of them."""
