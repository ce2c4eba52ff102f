"""Options of hooks: described by a class's signature and docstring, and checked before use.

An option is a parameter of `__init__`. Its annotation defines the valid values, its default is the
option's default, and the class docstring explains it under `Args:`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from itertools import islice
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import ConfigDict, PydanticSchemaGenerationError, TypeAdapter, ValidationError

from hookline.arguments import is_number, show_value
from hookline.errors import ConfigError, RegistrationError, nearest
from hookline.hook import Hook
from hookline.masking import MASK, remember_secrets
from hookline.printable import message_lines

REGISTRATION_KEYS = ("every", "sample_rate", "from_epoch", "before", "after", "strict", "ranks")
"""The arguments of `add_hook` that a configuration may have beside a hook's name."""

_EMPTY = inspect.Parameter.empty
_MAX_PROBLEMS = 10  # that a message shows


@dataclass(frozen=True)
class Option:
    """One option of a hook."""

    name: str
    type: str
    default: Any
    text: str
    hint: Any

    @property
    def required(self) -> bool:
        """Whether the option has no default."""
        return self.default is _EMPTY

    @cached_property
    def _adapter(self) -> TypeAdapter[Any] | None:
        """The validator of the annotation; None if pydantic does not support the type."""
        try:
            return TypeAdapter(self.hint, config=ConfigDict(arbitrary_types_allowed=True))
        except PydanticSchemaGenerationError:
            return None

    def find_problem(self, value: Any) -> str | None:
        """Return why a value is not valid, or None if it is."""
        if self._adapter is None:
            return None
        try:
            valid = self._adapter.validate_python(value)
        except ValidationError as error:
            return _join_messages(error)
        except Exception as error:  # of the value's own methods, or too deeply nested
            return f"It cannot be read ({type(error).__name__})"
        # The value is passed on unconverted.
        if isinstance(value, str) and isinstance(valid, int | float):
            if isinstance(valid, bool):
                return "Write true or false, without quotes"
            return "Write the number without quotes"
        if isinstance(valid, int | float) and not is_number(value):
            return f"Give a Python number: {type(valid).__name__}(…)"
        if isinstance(valid, str) and not isinstance(value, str):
            return "Input should be a valid string"
        if isinstance(valid, list | tuple) and not isinstance(value, list | tuple):
            return "Input should be a valid list"
        return None


def _join_messages(error: ValidationError) -> str:
    """Return what pydantic says, each message once."""
    messages = dict.fromkeys(str(detail["msg"]) for detail in error.errors(include_url=False))
    return "; ".join(islice(messages, _MAX_PROBLEMS))


@dataclass(frozen=True)
class OptionProblem:
    """One invalid, unknown or missing option, and what to do."""

    option: str
    text: str


class OptionsError(ConfigError):
    """Options do not match a hook's signature.

    Attributes:
        class_name: the hook's class.
        problems: one for each option that is wrong.
    """

    def __init__(self, class_name: str, problems: Iterable[OptionProblem]) -> None:
        self.class_name = class_name
        self.problems = tuple(problems)
        first, *others = (one.text for one in self.problems[:_MAX_PROBLEMS])
        if len(self.problems) > _MAX_PROBLEMS:
            others.append(f"And {len(self.problems) - _MAX_PROBLEMS} more problems.")
        super().__init__(message_lines(f"{class_name}: {first}", *others))


class BuiltIn(Hook):
    """Base class of Hookline's own hooks, whose options are checked when one is created.

    The options are the parameters of `__init__`; `hookline_options` keeps them for the manifest.
    """

    cost: ClassVar[str] = ""
    """The hook's cost, in one sentence."""

    every_name: ClassVar[str] = ""
    """Another name of the option `every`, which manifests have."""

    _given_every: Any = None  # not by default, but by the user

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.hookline_cost = cls.cost
        if "__init__" in vars(cls):
            # Not `cls.__init__ =`, which type checkers take for an `__init__` of BuiltIn itself.
            setattr(cls, "__init__", _accept_other_name(vars(cls)["__init__"]))  # noqa: B010

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the options. `__init__` receives them as they were passed."""
        hook = super().__new__(cls)
        resolved = check_options(cls, options, args, require_all=False)
        hook.hookline_options = mask_declared(cls, resolved)
        hook._given_every = _given_options(cls, options, args).get("every")
        return hook

    @classmethod
    def follows_registration(cls) -> bool:
        """Return whether `every` of the registration sets the option `every` of the hook."""
        kind: Any = cls  # mypy does not take a class with classmethods for hashable
        own = get_options(kind).get("every")
        return own is not None and own.default is not None

    def hookline_follow(self, every: int) -> bool:
        """Set the option `every` to that of the registration, if the hook has one."""
        if self._given_every not in (None, every):
            name = type(self).__name__
            raise RegistrationError(
                f"{name}(every={self._given_every!r}) is registered with every={every!r}. "
                "Give one of them."
            )
        if not self.follows_registration():
            return False
        self.__dict__["every"] = int(every)
        self.hookline_options = {**self.hookline_options, self.every_name or "every": int(every)}
        return True


@cache
def get_options(hook_class: Any) -> Mapping[str, Option]:
    """Return a hook class's options by name."""
    documented = next(base for base in hook_class.__mro__ if "__init__" in base.__dict__)
    texts = _argument_texts(documented) | _argument_texts(hook_class)
    hints = _type_hints(hook_class)
    return {
        parameter.name: Option(
            name=parameter.name,
            type=_type_text(parameter.annotation),
            default=parameter.default,
            text=texts.get(parameter.name, ""),
            hint=hints.get(parameter.name, Any),
        )
        for parameter in _parameters(hook_class)
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def check_options(
    hook_class: Any,
    options: Mapping[str, Any],
    args: tuple[Any, ...] = (),
    *,
    check_values: bool = True,
    require_all: bool = True,
) -> dict[str, Any]:
    """Return a hook's options including defaults; raise if they do not match its signature.

    Args:
        hook_class: the hook's class.
        options: options passed by name.
        args: options passed by position.
        check_values: whether to check values against their annotations.
        require_all: whether an option without default must be given; False leaves the error to
            Python's own call.
    """
    known = get_options(hook_class)
    given = _given_options(hook_class, options, args)
    remember_secrets(given)
    remember_secrets([given.get(name) for name in hook_class.secret_options], is_secret=True)
    open_ended = any(one.kind is one.VAR_KEYWORD for one in _parameters(hook_class))
    problems: list[OptionProblem] = []
    other = getattr(hook_class, "every_name", "")
    for name, value in given.items():
        if name in known:
            problem = known[name].find_problem(value) if check_values else None
            if problem is not None:
                shown = MASK if name in hook_class.secret_options else show_value(value, name)
                given_as = other if name == "every" and other in options else name
                problems.append(OptionProblem(given_as, f"'{given_as}' is {shown}. {problem}."))
        elif open_ended:
            continue
        elif name in REGISTRATION_KEYS:
            problems.append(OptionProblem(name, _belongs_to_registration(hook_class, name)))
        else:
            valid = f"The options are: {', '.join(known)}." if known else "It has no options."
            text = f"Unknown option '{name}'.{nearest(name, known)} {valid}"
            problems.append(OptionProblem(name, text))
    for name, option in known.items():
        if require_all and option.required and name not in given:
            text = f"The option '{name}' is required" + (f": {option.text}" if option.text else ".")
            problems.append(OptionProblem(name, text))
    if problems:
        raise OptionsError(hook_class.__name__, problems)
    return {name: one.default for name, one in known.items() if not one.required} | given


def mask_declared(hook_class: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for the manifest, with those masked that the hook declares secret."""
    given = [name for name in hook_class.secret_options if options.get(name) is not None]
    masked = {**options, **dict.fromkeys(given, MASK)}
    other = getattr(hook_class, "every_name", "")
    return {other if other and name == "every" else name: one for name, one in masked.items()}


def _accept_other_name(initialize: Any) -> Any:
    """Return an `__init__` that also takes `every` under its other name."""
    known = inspect.signature(initialize).parameters

    @wraps(initialize)
    def accept(hook: BuiltIn, *args: Any, **options: Any) -> None:
        initialize(hook, *args, **_rename_every(type(hook), options, known))

    return accept


def _given_options(
    hook_class: Any, options: Mapping[str, Any], args: tuple[Any, ...] = ()
) -> dict[str, Any]:
    """Return the options that a hook is created with, by name, as its `__init__` gets them."""
    known = get_options(hook_class)
    return dict(zip(known, args, strict=False)) | _rename_every(hook_class, options, known)


def _rename_every(
    hook_class: Any, options: Mapping[str, Any], known: Container[str]
) -> dict[str, Any]:
    other = getattr(hook_class, "every_name", "")
    if not other or other not in options or other in known:
        return dict(options)
    if "every" in options:
        text = f"'every' and '{other}' are the same option. Give one of them."
        raise OptionsError(hook_class.__name__, [OptionProblem("every", text)])
    return {"every" if name == other else name: value for name, value in options.items()}


def _belongs_to_registration(hook_class: Any, name: str) -> str:
    problem = (
        f"'{name}' belongs to the registration. Give it to add_hook(hook, {name}=…), beside the "
        "hook's name in a config file, or write hookline.every(N, hook) in a list of hooks."
    )
    if name == "every" and hook_class.hookline_kind == "probe":
        problem += " Outside of training: hookline.probe(model, …, every=…)."
    return problem


def _parameters(hook_class: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(hook_class.__init__).parameters.values())[1:]


def _type_hints(hook_class: Any) -> dict[str, Any]:
    try:
        return get_type_hints(hook_class.__init__, include_extras=True)
    except (NameError, TypeError):  # annotations that only a type checker understands
        return {}


def _type_text(annotation: Any) -> str:
    if annotation is _EMPTY:
        return "Any"
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "Any")


def _argument_texts(documented: Any) -> dict[str, str]:
    """Return the description of each argument in a docstring's `Args:` section."""
    _, _, section = (inspect.getdoc(documented) or "").partition("Args:\n")
    section = section.partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8,}.*)*)", section, flags=re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in found}
