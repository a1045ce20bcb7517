"""The same methods on a real federation: nodes with their own images, and a server that sees names and counts."""
