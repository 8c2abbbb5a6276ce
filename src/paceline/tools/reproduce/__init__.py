"""Claims of the field: each declared once, run by one command, drawn, and judged against its anchor."""
