"""Serves the resources server mcqa of NeMo Gym on loopback, without its head server: python nemo_gym_server.py PORT"""

import sys

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.mcqa.app import MCQAResourcesServer, MCQAResourcesServerConfig

if __name__ == "__main__":
    port = int(sys.argv[1])
    server = MCQAResourcesServer(
        config=MCQAResourcesServerConfig(name="mcqa", host="127.0.0.1", port=port, entrypoint="app.py"),
        server_client=ServerClient(
            head_server_config=BaseServerConfig(host="127.0.0.1", port=port), global_config_dict=OmegaConf.create({})
        ),
    )
    uvicorn.run(server.setup_webserver(), host="127.0.0.1", port=port)
