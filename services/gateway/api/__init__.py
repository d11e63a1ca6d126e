"""The schema that OpenAI clients know: request bodies in, answers out. Pydantic appears only here."""
