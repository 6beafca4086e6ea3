"""Servers measured from outside: any endpoint that speaks OpenAI's protocol."""
