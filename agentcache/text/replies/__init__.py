"""Parsing of replies into reasoning, text and tool calls."""
