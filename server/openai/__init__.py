"""OpenAI's protocol: completions, chats, responses."""
