"""Ops of static shapes, for devices under torch that record steps or wait badly."""
