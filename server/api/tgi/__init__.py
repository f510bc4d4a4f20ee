"""The routes of Hugging Face's TGI."""
