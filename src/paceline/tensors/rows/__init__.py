"""Keyed rows: tables whose ids nobody listed in advance, spread over the servers by the hash of an id."""
