"""The config of a run: its sections have every key (`sections.py`), `load.py` reads and writes recipes."""

from jetrl.config.keys import sections as sections
from jetrl.config.load import digest as digest
from jetrl.config.load import load_config as load_config
from jetrl.config.load import parse_config as parse_config
from jetrl.config.load import resolve as resolve
from jetrl.config.load import switched_off as switched_off
from jetrl.config.load import to_toml as to_toml
from jetrl.config.rl import RLConfig as RLConfig
from jetrl.config.sections import Config as Config
from jetrl.config.sections import EnvironmentConfig as EnvironmentConfig
from jetrl.config.sections import QuantConfig as QuantConfig
from jetrl.config.sections import TaskConfig as TaskConfig
