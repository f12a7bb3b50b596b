"""The hardware-agnostic part of headrace: it imports only itself and asks capabilities, never identities."""
