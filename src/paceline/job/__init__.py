"""What all processes of a job agree on: spec, strategy, environment, addresses.

Other folders use `addresses`, `carriers`, `choices`, `credentials.certificates`, `credentials.holders`,
`credentials.key_store`, `credentials.revocation`, `environment`, `folders`, `machines`, `mesh`, `spec`, `strategy`,
`views`.
"""
