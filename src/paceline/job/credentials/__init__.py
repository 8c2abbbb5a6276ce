"""Certificates, tokens, and the folders that hold them."""
