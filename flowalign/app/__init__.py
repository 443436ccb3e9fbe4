"""What people use: the Python API, the command line, the gallery, the export."""
