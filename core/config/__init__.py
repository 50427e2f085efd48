"""The configuration: pydantic models, read from YAML, `--set` and flags.

Sections belong to whoever reads them: `octavo.engine.config.EngineConfig` has the engine's. Another
package that needs a section (the server's `server`, or one that chooses implementations of a third
party's kind) adds it in a subclass, and names the subclass by an entry point of the group
`octavo.config`:

    class ServiceConfig(EngineConfig):
        server: ServerConfig = Field(default_factory=ServerConfig, description="The HTTP server.")

    [project.entry-points."octavo.config"]
    server = "octavo.server.config:ServiceConfig"

`config_model` joins the sections of every installed package, and `load_config` validates against
them: unknown keys, `--set`, lines of the file and the JSON Schema work for all sections alike.
Settings of an implementation need no section: they are its options.
"""

from octavo.core.config.loading import config_model, load_config
from octavo.core.config.models import BaseConfig, ImplementationConfig, Section
from octavo.core.config.origin import Origin

__all__ = [
    "BaseConfig",
    "ImplementationConfig",
    "Origin",
    "Section",
    "config_model",
    "load_config",
]
