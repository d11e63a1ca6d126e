"""/tokenize, /detokenize and /v1/models."""

import secrets

from aiohttp import web
from pydantic import BaseModel

from common.ids import unpack_ids
from common.messages import Decode, Decoded, Encode, Encoded, PoolCard
from services.gateway.api.answers import DetokenizeAnswer, ModelEntry, ModelList, TokenizeAnswer
from services.gateway.api.tokens import parse_detokenize, parse_tokenize
from services.gateway.errors import unknown_model
from services.gateway.http.gateway import Gateway


class TokenRoutes:
    """Handlers that ask a tokenizer one question, and those that need not even that."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._gateway.read(request, parse_tokenize)
        prompt = body.text_or_chat()
        card = self._gateway.ring.card(body.model)
        question = Encode(
            call_id=_call_id(),
            model=card.model.name,
            prompt=prompt,
            add_special_tokens=body.add_special_tokens is not False,
        )
        answer = await self._ask(question)
        assert isinstance(answer, Encoded), "an Encode is answered by an Encoded"
        tokens = list(unpack_ids(answer.token_ids))
        return _json(TokenizeAnswer(count=len(tokens), max_model_len=answer.max_model_len, tokens=tokens))

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._gateway.read(request, parse_detokenize)
        card = self._gateway.ring.card(body.model)
        body.tokens.check_vocabulary(card.model.vocab_size, "tokens")
        question = Decode(call_id=_call_id(), model=card.model.name, token_ids=body.tokens.packed)
        answer = await self._ask(question)
        assert isinstance(answer, Decoded), "a Decode is answered by a Decoded"
        return _json(DetokenizeAnswer(prompt=answer.text))

    async def models(self, _: web.Request) -> web.Response:
        return _json(ModelList(data=[self._entry(card) for card in self._gateway.ring.cards().values()]))

    async def model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        card = self._gateway.ring.cards().get(name)
        if card is None:
            raise unknown_model(name)
        return _json(self._entry(card))

    async def _ask(self, question: Encode | Decode) -> Encoded | Decoded:
        self._gateway.check_room(1)
        return await self._gateway.ring.ask(question, self._gateway.config.call_timeout_s)

    def _entry(self, card: PoolCard) -> ModelEntry:
        return ModelEntry(id=card.model.name, created=self._gateway.started_s, max_model_len=card.model.max_model_len)


def _call_id() -> str:
    return f"call-{secrets.token_hex(12)}"


def _json(answer: BaseModel) -> web.Response:
    return web.Response(body=answer.model_dump_json().encode(), content_type="application/json")
