"""Interfaces for people: the Python API, the command line, the gallery, the export."""
