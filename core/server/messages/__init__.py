"""Anthropic's Messages API over chat's turns: blocks to messages, answers to blocks and events."""
