"""A conversation without an endpoint: the agent gets each response as soon as it is complete."""

from typing import Any

from megatron_grpo.rollouts.conversation import Conversation, Response


class DirectConversation(Conversation):
    async def _sample(self, *arguments: Any) -> Response:
        response = await super()._sample(*arguments)
        self.deliver([response])
        return response


def deliver_at_once(conversation: Conversation) -> Conversation:
    """Let a conversation that a rollout has opened deliver its responses itself."""
    conversation.__class__ = DirectConversation
    return conversation
