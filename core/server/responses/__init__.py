"""The Responses API over chat's turns: items to messages, answers to events, responses that are kept."""
