"""The JSON of requests and responses as msgspec types, one file a protocol."""
