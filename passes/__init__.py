"""Passes: analyses (graph -> frozen facts) and transforms (graph + facts -> new graph). See README.md."""
