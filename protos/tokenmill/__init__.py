"""Code generated from the .proto files beside it; `make protos` makes it anew."""
