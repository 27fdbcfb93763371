"""Watch attention circuits form while a language model trains."""
