"""The rules of the CUDA driver that host code can meet: handles, attributes, refused launches."""
