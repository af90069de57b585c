"""`bluejay generate`: continue a prompt from the command line, a file, standard input, or line by line."""

from __future__ import annotations

import dataclasses
import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bluejay.cli.display import Display
from bluejay.cli.environment import cache_folder, preferred_compiler
from bluejay.cli.launch import device_of_rank, is_heard, is_starter, layout_of, ranks, start_ranks
from bluejay.config import GenerationConfig
from bluejay.errors import RequestError

if TYPE_CHECKING:
    from bluejay.config import RunConfig
    from bluejay.generate import Completion, Engine, Generation, TokenLogprob

_DEFAULT = GenerationConfig()


def generate(
    program: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; `-` or nothing reads stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Read one prompt a line; they are answered together.")] = None,
    model: Annotated[str, typer.Option(help="`nano` (bundled), a checkpoint directory, or a hub id.")] = "nano",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = _DEFAULT.max_new_tokens,
    min_new_tokens: Annotated[int, typer.Option(help="Tokens to write before an end of text may come.")] = 0,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token; 1: the model's distribution.")] = 0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that make up this probability.")] = 1,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this fraction of the likeliest one's.")] = 0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: avoid tokens that already occurred.")] = 1,
    num_beams: Annotated[int, typer.Option(help="Above 1: beam search.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Beam search: above 0 favors longer answers.")] = 1,
    early_stopping: Annotated[str, typer.Option(help="Beam search: true, false or never.")] = "false",
    n: Annotated[int, typer.Option("--n", "-n", help="Answers: samples, or the best n beams.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    stop_id: Annotated[list[int] | None, typer.Option(help="End at this token id; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Do not end at the checkpoint's end of text.")] = False,
    seed: Annotated[int | None, typer.Option(help="Make sampling repeatable.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities and the k likeliest.")] = None,
    prompt_logprobs: Annotated[int | None, typer.Option(help="With --json: the same for the prompt.")] = None,
    over_window: Annotated[str, typer.Option(help="Prompt + answer over the window: refuse, or cut.")] = "refuse",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")] = "",
    quantize: Annotated[str, typer.Option(help="Pack weights while loading: int4-g64, int4-row, int4-g32-mse.")] = "",
    kernel: Annotated[str, typer.Option(help="Four-bit products: auto, an instruction set, or x8 (coarser).")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Ranks that hold the model together; started here.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Stages of a pipeline; other devices share layers.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens a row may hold; 0: the model's window.")] = 0,
    backend: Annotated[str, typer.Option(help="auto, inductor (compiled) or eager (no compiler).")] = "auto",
    loop: Annotated[str, typer.Option(help="Steps a call: host, one; device, several; unrolled, all.")] = "host",
    iterations: Annotated[int, typer.Option(help="Steps a call of the device loop.")] = 8,
    cache: Annotated[Path | None, typer.Option(help="Folder of compiled programs.")] = None,
    strict: Annotated[bool, typer.Option(help="A missing tensor is an error.")] = True,
    verify: Annotated[bool, typer.Option(help="Look for NaN weights while loading.")] = True,
    offline: Annotated[bool, typer.Option(help="Never ask the network for a hub id.")] = False,
    echo: Annotated[bool, typer.Option(help="Write the prompt before the answer.")] = False,
    interactive: Annotated[bool, typer.Option(help="Take turns: you write a line, the model goes on.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress and no line of figures.")] = False,
    json: Annotated[bool, typer.Option(help="Print one JSON object instead of text.")] = False,
) -> None:
    """Continue a prompt with a GPT-J model. Text goes to stdout, figures to stderr."""
    config = GenerationConfig.of(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping={"true": True, "false": False}.get(early_stopping.lower(), early_stopping),
        n=n,
        stop=stop,
        stop_ids=stop_id,
        ignore_eos=ignore_eos,
        seed=seed,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        over_window=over_window,
    )
    has_prompt = any(given is not None for given in (prompt, file, prompts))
    _check_together(config, has_prompt=has_prompt, interactive=interactive, json=json, echo=echo)
    layout = layout_of(devices, stages)
    if layout.num_devices > 1:
        _check_ranks(interactive, loop)
    if is_starter(devices):
        raise typer.Exit(start_ranks(program.obj, devices))

    from bluejay.build import build, digest_of_files
    from bluejay.generate import Engine, run_config

    device = device_of_rank(device)
    run = run_config(
        model,
        dtype or None,
        quantize=quantize,
        kernel=kernel,
        device=device,
        context=context,
        backend=backend,
        cxx=preferred_compiler(),
        cache=str(cache or cache_folder()),
        loop=loop,
        iterations=iterations,
        strict=strict,
        verify=verify,
        offline=offline,
        layout=layout,
    )
    asked = [config, common(run), digest_of_files(run)] if layout.num_devices > 1 else []
    warnings: list[str] = []
    quiet = quiet or not is_heard()
    with ranks(layout, asked, device) as mesh, Display(quiet) as display:
        texts = [] if interactive else _prompts_for_all(mesh, prompt, file, prompts)

        def observe(event: Any) -> None:
            if event.name == "warning":
                warnings.append(event.fields["text"])
            display(event)

        max_rows = max(config.num_beams, min(config.n * len(texts), 8), 1)
        engine = Engine(build(dataclasses.replace(run, max_rows=max_rows), observe, mesh=mesh))
        if interactive:
            _take_turns(engine, config, quiet)
            return
        results = _run(engine, texts, config, echo=echo, silent=json)
        if json:
            answers = [_as_dict(text, result) for text, result in zip(texts, results, strict=True)]
            about = _about(engine, results, warnings, mesh)
            record = {"prompts": answers} if prompts else answers[0]
            print(json_format.dumps({"model": model, **record, **about}, ensure_ascii=False))
        if not quiet:
            print(_figures_line(engine, results), file=sys.stderr)


def common(run: RunConfig) -> RunConfig:
    """What of a run all ranks must have been asked alike: all but where each keeps things, and its own device."""
    spec = dataclasses.replace(run.compile, cxx="")
    return dataclasses.replace(run, cache="", device=run.device.partition(":")[0], compile=spec)


def _check_ranks(interactive: bool, loop: str) -> None:
    """Refuse what several ranks cannot do, before they are started."""
    if interactive or loop == "unrolled":
        raise RequestError(
            asked="--devices above 1 with " + ("--interactive" if interactive else "--loop unrolled"),
            found="one rank that hears the terminal" if interactive else "a whole answer as one program",
            rule="ranks take their prompts at the start, and settle on each token between two programs",
            fix="leave it out",
        )


def _prompts_for_all(mesh: Any, prompt: str | None, file: Path | None, prompts: Path | None) -> list[str]:
    """The prompts, read once: by the first rank, when there are several."""
    if mesh is None:
        return _read_prompts(prompt, file, prompts)
    from bluejay.parallel import from_first

    return from_first(_read_prompts(prompt, file, prompts) if mesh.get_rank() == 0 else [])


def _read_prompts(prompt: str | None, file: Path | None, prompts: Path | None) -> list[str]:
    if prompts is None:
        return [_read_prompt(prompt, file)]
    if prompt is not None or file is not None:
        raise RequestError(
            asked=f"--prompts {prompts} and another prompt",
            found=repr(prompt[:40]) if prompt is not None else f"--file {file}",
            rule="prompts come from one place",
            fix="leave one out",
        )
    lines = [line.removesuffix("\r") for line in _read_prompt(None, prompts).split("\n")]  # also of Windows' files
    if empty := [number for number, line in enumerate(lines, start=1) if not line]:
        raise RequestError(
            asked=f"the prompts in {prompts}",
            found=f"nothing in line {empty[0]}",
            rule="every line is a prompt",
            fix="remove the line",
        )
    return lines


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt, without the one newline that editors and `echo` add at the end."""
    if prompt is not None and file is not None:
        raise RequestError(
            asked="a prompt as argument and --file",
            found=f"{prompt[:40]!r} and {file}",
            rule="one prompt, from one place",
            fix="leave one out",
        )
    if prompt is not None and prompt != "-":
        return prompt
    if file is None and sys.stdin.isatty():
        raise RequestError(
            asked="text to continue",
            found="no prompt, no --file, and nothing piped in",
            fix='bluejay generate "Once upon a time", or --interactive',
        )
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        raise RequestError(
            asked=f"the prompt in {file}", found=error.strerror or str(error), fix="name a file"
        ) from None
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            asked=f"the prompt in {file or 'standard input'}",
            found=f"byte {data[error.start]:#04x} at offset {error.start}",
            rule="prompts are UTF-8 text",
            fix="convert it, for example with iconv -t utf-8",
        ) from None


def _check_together(config: GenerationConfig, *, has_prompt: bool, interactive: bool, json: bool, echo: bool) -> None:
    """Refuse options that would be dropped because of others."""
    if not json and (config.logprobs is not None or config.prompt_logprobs is not None):
        raise RequestError(
            asked="log-probabilities", found="text output", rule="text has no place for them", fix="add --json"
        )
    if json and echo:
        raise RequestError(
            asked="--json with --echo",
            found="an object that holds the prompt",
            rule="the prompt is in its own field",
            fix="leave --echo out",
        )
    given = {"a prompt": has_prompt, "--json": json, "--echo": echo, f"--n {config.n}": config.n > 1}
    clashes = [name for name, is_given in given.items() if is_given]
    if interactive and clashes:
        raise RequestError(
            asked=f"--interactive with {', '.join(clashes)}",
            found="a conversation of single lines",
            rule="each turn is a line that you write and one answer, as text",
            fix="leave one of them out",
        )


def _run(engine: Engine, texts: list[str], config: GenerationConfig, *, echo: bool, silent: bool) -> list[Generation]:
    """Answer the prompts together; a single answer is streamed as it comes, several are printed when complete."""
    streamed = config.n == 1 and not silent
    requests = [engine.submit(text, config) for text in texts]
    results = []
    for number, (text, request) in enumerate(zip(texts, requests, strict=True), start=1):
        if len(texts) > 1 and not silent:
            print(f"=== prompt {number} of {len(texts)}")
        if echo and not silent:
            print(text, end="", flush=True)
        for piece in engine.pieces(request):
            if streamed:
                print(piece, end="", flush=True)
        results.append(engine.collect(request))
        if streamed:
            print()
        elif not silent:
            for i, completion in enumerate(results[-1].completions, start=1):
                print(f"{_heading(i, completion, config.n)}\n{completion.text}\n")
    return results


def _heading(i: int, completion: Completion, total: int) -> str:
    score = "" if completion.score is None else f", score {completion.score:.3f}"
    return f"--- answer {i} of {total} ({completion.stop_reason}{score})"


def _take_turns(engine: Engine, config: GenerationConfig, quiet: bool) -> None:
    """A conversation: every line is added to the text so far, and the model continues all of it."""
    if not quiet:
        print("Write a line; the model goes on from everything so far. /new forgets, Ctrl-D leaves.", file=sys.stderr)
    ids: list[int] = []
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip() == "/new":
            ids = []
            continue
        if not line:
            continue
        ids += engine.tokenizer.encode(("\n" if ids else "") + line)
        room = max(engine.context - config.max_new_tokens, engine.context // 2)
        if room < len(ids):
            print(f"bluejay: the window is full; forgetting the first {len(ids) - room} tokens", file=sys.stderr)
            ids = ids[-room:]
        request = engine.submit(ids, config)
        try:
            for piece in engine.pieces(request):
                print(piece, end="", flush=True)
        except KeyboardInterrupt:  # ends this answer, not the conversation
            engine.cancel(request)
        print()
        answer = engine.collect(request)
        if answer.stop_reason in ("eos", "stop_id"):
            ids += answer.ids[:-1]
        else:
            ids += engine.tokenizer.encode(answer.text) if answer.stop_reason == "stop" else answer.ids


def _figures_line(engine: Engine, results: list[Generation]) -> str:
    from bluejay.machine import peak_memory_bytes
    from bluejay.units import format_bytes, format_seconds

    figures = engine.figures
    parts = []
    if figures.prompt_tokens:
        rate = figures.prompt_tokens / figures.prefill_seconds
        parts.append(f"{figures.prompt_tokens} prompt tokens at {rate:,.0f}/s")
    if figures.decoded_tokens:
        rate = figures.decoded_tokens / figures.decode_seconds
        total = sum(len(c.ids) for result in results for c in result.completions)
        parts.append(f"{total} new tokens, decoded at {rate:,.0f}/s")
    if results[0].first_token_seconds is not None:
        parts.append(f"first after {format_seconds(results[0].first_token_seconds)}")
    if figures.compile_seconds >= 0.1:
        parts.append(f"programs {format_seconds(figures.compile_seconds)}")
    parts.append(f"peak memory {format_bytes(peak_memory_bytes())}")
    return "bluejay: " + ", ".join(parts)


def _about(engine: Engine, results: list[Generation], warnings: list[str], mesh: Any) -> dict[str, Any]:
    """What the run did: figures and warnings, and over several ranks those of each."""
    from bluejay.machine import peak_memory_bytes

    figures = dataclasses.asdict(engine.figures)
    figures["new_tokens"] = sum(len(c.ids) for result in results for c in result.completions)
    figures["first_token_seconds"] = results[0].first_token_seconds
    figures["peak_memory_bytes"] = peak_memory_bytes()
    record = {"figures": figures, "warnings": warnings}
    if mesh is None:
        return record
    from bluejay.parallel import from_all

    return {**record, "ranks": from_all({"rank": mesh.get_rank(), **record})}


def _as_dict(text: str, result: Generation) -> dict[str, Any]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"id": token.id, "logprob": token.logprob, "top": [list(pair) for pair in token.top]}

    completions = []
    for completion in result.completions:
        fields: dict[str, Any] = {
            "text": completion.text,
            "ids": list(completion.ids),
            "stop_reason": completion.stop_reason,
        }
        if completion.score is not None:
            fields["score"] = completion.score
        if completion.logprobs is not None:
            fields["logprobs"] = [entry(token) for token in completion.logprobs]
        completions.append(fields)
    record: dict[str, Any] = {
        "prompt": text,
        "prompt_ids": list(result.prompt_ids),
        "seed": result.seed,
        "completions": completions,
    }
    if result.prompt_logprobs is not None:
        record["prompt_logprobs"] = [entry(token) for token in result.prompt_logprobs]
    return record
