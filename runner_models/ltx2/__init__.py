"""LTX-2.5: recipes, loading, the staged pipeline and its decoder."""
