"""Tools of a request and the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from draftsmith.chats.messages import plain_tool
from draftsmith.serve.bodies.formats import JsonObject, StrictModel, Text
from draftsmith.serve.tools.calls import LONGEST_NAME, NAME_LETTERS, Tool

Name = Annotated[Text, Field(pattern=f"^[{NAME_LETTERS}]{{1,{LONGEST_NAME}}}$")]


class Function(StrictModel):
    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return plain_tool(dict(self.function))

    def tool(self) -> Tool:
        return Tool(self.function.name, self.function.parameters or {}, bool(self.function.strict))


class NamedFunction(StrictModel):
    name: Text


class NamedChoice(StrictModel):
    type: Literal["function"]
    function: NamedFunction


class ToolChoice(NamedTuple):
    """Tools that an answer may call."""

    tools: tuple[Tool, ...] = ()  # none: whatever looks like a call is text
    forced: bool = False
    parallel: bool = True


class ToolFields(StrictModel):
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: None = None
    function_call: None = None

    @field_validator("functions", "function_call", mode="before")
    @classmethod
    def _are_tools_now(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("it is OpenAI's former name; give tools and tool_choice in its place")
        return value

    @model_validator(mode="after")
    def _choice_names_a_tool(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"tools holds {twice!r} twice; give each function its own name")
        if isinstance(self.tool_choice, NamedChoice):
            if self.tool_choice.function.name not in names:
                raise ValueError(
                    f"tool_choice names {self.tool_choice.function.name!r}, which is none of "
                    f"tools {names}; name one of them"
                )
        elif self.tool_choice == "required" and not names:
            raise ValueError("tool_choice is required without tools; give tools or leave it out")
        return self

    def offered(self) -> list[FunctionTool]:
        """Tools that the model gets to see."""
        return [] if self.tool_choice == "none" else self.tools or []

    def choice(self) -> ToolChoice:
        tools = tuple(tool.tool() for tool in self.offered())
        if isinstance(self.tool_choice, NamedChoice):
            name = self.tool_choice.function.name
            named = tuple(tool for tool in tools if tool.name == name)
            return ToolChoice(named, forced=True, parallel=False)
        return ToolChoice(
            tools,
            forced=self.tool_choice == "required",
            parallel=self.parallel_tool_calls is not False,
        )
