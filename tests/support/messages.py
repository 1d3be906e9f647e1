"""Hypothesis strategies for every message, built from the types themselves."""

import struct

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from protocol import messages


def _subclasses(base):
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


def message_classes():
    """Every concrete message: LinkMessage and Pull are only bases."""
    return sorted(
        set(_subclasses(messages.Message)) - {messages.LinkMessage, messages.Pull},
        key=lambda kind: kind.__name__,
    )


def item_classes():
    return sorted(set(_subclasses(messages.Item)), key=lambda kind: kind.__name__)


def message(kind) -> st.SearchStrategy:
    return _strategy(mi.type_info(kind))


token_bytes = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(
    lambda ids: struct.pack(f"<{len(ids)}i", *ids)
)


def _strategy(info):
    return _BUILDERS[type(info)](info)


def _struct(info):
    fields = {field.name: _strategy(field.type) for field in info.fields}
    return st.fixed_dictionaries(fields).map(lambda values: info.cls(**values))


def _tuple(info):
    items = st.lists(
        _strategy(info.item_type),
        min_size=info.min_length or 0,
        max_size=min(info.max_length or 3, 3),
    )
    return items.map(tuple)


_BUILDERS = {
    mi.StructType: _struct,
    mi.VarTupleType: _tuple,
    mi.UnionType: lambda info: st.one_of([_strategy(each) for each in info.types]),
    mi.IntType: lambda info: st.integers(info.ge, info.le),
    mi.TupleType: lambda info: st.tuples(*map(_strategy, info.item_types)),
    mi.FloatType: lambda info: st.floats(
        info.ge if info.gt is None else info.gt,
        info.le,
        exclude_min=info.gt is not None,
        allow_nan=False,
        allow_infinity=False,
    ),
    mi.StrType: lambda info: st.text(
        min_size=info.min_length or 0, max_size=min(info.max_length, 20)
    ),
    mi.BytesType: lambda info: token_bytes,
    mi.NoneType: lambda info: st.none(),
    mi.BoolType: lambda info: st.booleans(),
    mi.LiteralType: lambda info: st.sampled_from(info.values),
    mi.DictType: lambda info: st.dictionaries(
        _strategy(info.key_type), _strategy(info.value_type), max_size=3
    ),
}


def fields_of_bytes():
    """(class, field, type info) of every field of bytes, for the rule that they hold token ids."""
    return [
        (kind, field.name, field.type)
        for kind in [*message_classes(), *item_classes()]
        for field in mi.type_info(kind).fields
        if isinstance(field.type, mi.BytesType)
    ]


def tree(message_):
    """The message as the builtin objects that travel."""
    return msgspec.to_builtins(message_, builtin_types=(bytes,))
