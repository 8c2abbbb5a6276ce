"""Who belongs to a job: certificates, tokens, and folders that hold them."""
