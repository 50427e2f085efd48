"""Requests and responses as pydantic models, and how a JSON object becomes a request.

`common` has the bases and the parser, `sampling` what completions and chat share, then one module
an endpoint. `docs/server.md` lists the parameters.
"""
