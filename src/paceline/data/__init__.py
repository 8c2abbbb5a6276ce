"""Feeding: which worker gets which sample."""
