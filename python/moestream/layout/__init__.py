"""The laid file: docs/layout.md says what is in it."""
