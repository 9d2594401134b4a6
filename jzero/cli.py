"""The command `jzero`: reads its arguments, calls, prints.

Exit codes: 0 done (also after SIGTERM or Ctrl-C, when the run was saved and the same command continues it); 2 a mistake
in what was asked for, with one line on standard error that begins with "jzero:"; 130, 141 and 143 ended by Ctrl-C,
because nobody reads the output any more, or by SIGTERM where there was nothing to save.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from jzero.errors import JzeroError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
        argv: the arguments; default: those of the process.

    Example:
        >>> main(["data", "build", "--input", "no-such-file", "--tokenizer", "bytes", "--output", "out"])
        2
    """
    arguments = _parse(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        with _sigterm():
            arguments.run(arguments)
            sys.stdout.flush()
    except JzeroError as error:
        return _end(2, " ".join(str(error).split()))
    except _TerminatedError:
        return _end(143, "ended by SIGTERM with nothing to save")
    except KeyboardInterrupt:
        return _end(130, "interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere
        return 141
    return 0


class _TerminatedError(BaseException):
    """SIGTERM, where the training loop does not handle it: before its first step and after its last."""


@contextlib.contextmanager
def _sigterm() -> Iterator[None]:
    """SIGTERM as an exception, so that whatever is half done is removed on the way out."""

    def end(number: int, frame: object) -> None:
        raise _TerminatedError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _end(code: int, line: str) -> int:
    print(f"jzero: {line}", file=sys.stderr)
    return code


def _train(arguments: argparse.Namespace) -> None:
    from jzero.train.config import load_config
    from jzero.train.loop import train

    train(load_config(arguments.config, arguments.overrides))


def _generate(arguments: argparse.Namespace) -> None:
    from jzero.train.generate import generate_from_run

    pieces = generate_from_run(
        arguments.run_folder,
        arguments.prompt,
        checkpoint=arguments.checkpoint,
        note=lambda text: print(text, file=sys.stderr),
        tokens=arguments.tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _evaluate(arguments: argparse.Namespace) -> None:
    from jzero.train.evaluate import evaluate

    found = evaluate(
        arguments.source,
        arguments.overrides,
        data=arguments.data,
        split=arguments.split,
        checkpoint=arguments.checkpoint,
        note=lambda text: print(text, file=sys.stderr),
    )
    if arguments.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name} {value:,.6g}" for name, value in found.items()))


def _convert(arguments: argparse.Namespace) -> None:
    from jzero.train.weights import convert

    convert(arguments.source, arguments.output, checkpoint=arguments.checkpoint)
    print(arguments.output)


def _build(arguments: argparse.Namespace) -> None:
    from jzero.data.text import build

    built = build(arguments.input, arguments.tokenizer, arguments.output, split=arguments.split_sentences)
    print(f"{arguments.output}: {built.documents:,} documents, {built.tokens:,} tokens")


def _tokenizer(arguments: argparse.Namespace) -> None:
    from jzero.data.tokenizer import train_tokenizer

    made = train_tokenizer(
        arguments.input,
        arguments.output,
        vocab_size=arguments.vocab_size,
        kind=arguments.kind,
        lowercase=arguments.lowercase,
    )
    print(f"{arguments.output}: {made.vocab_size:,} entries")


def _plan(arguments: argparse.Namespace) -> None:
    from jzero.plan.command import run

    run(arguments)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments; key=value may also stand behind options, where argparse expects no more positional ones."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    stray = [text for text in rest if text.startswith("-") or "=" not in text or not hasattr(arguments, "overrides")]
    if stray:
        arguments.command.error(f"unrecognized arguments: {' '.join(stray)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"jzero: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("jzero", description="Trains GPT and BERT models in JAX with a sharded optimizer.")
    parser.add_argument("--version", action="version", version=f"jzero {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model, or continue a run that was stopped",
        description="Trains a model. A run that was stopped or killed continues from its last checkpoint, bit for bit. "
        "SIGTERM, or Ctrl-C once, saves after the current step and exits with code 0.",
    )
    train.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/gpt_tiny.yaml")
    train.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="overrides, such as model.optim.lr=1e-3"
    )
    train.set_defaults(run=_train, command=train)

    generate = commands.add_parser("generate", help="continue a text with a trained model, or fill its gaps")
    generate.add_argument(
        "run_folder", metavar="RUN", type=Path, help="a run folder, such as runs/gpt_tiny, or one of Hugging Face's"
    )
    generate.add_argument("--prompt", required=True, help="the text to continue; for a BERT one with [MASK]")
    generate.add_argument("--tokens", type=int, default=200, help="how many tokens to add (default 200)")
    generate.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest (default 0.8)")
    generate.add_argument("--top-k", type=int, default=50, help="draw from the k likeliest, 0: all (default 50)")
    generate.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    generate.add_argument("--checkpoint", default="best", help="best, last, or a step (default best)")
    generate.set_defaults(run=_generate, command=generate)

    _add_plan(commands)
    _add_weights(commands)

    data = commands.add_parser("data", help="prepare data").add_subparsers(required=True, metavar="COMMAND")
    build = data.add_parser("build", help="tokenize text files into one indexed file")
    build.add_argument("--input", metavar="FILE", nargs="+", required=True, help="text files, or .jsonl with key text")
    build.add_argument("--tokenizer", required=True, help='"bytes", or the path of a tokenizer.json')
    build.add_argument("--output", metavar="PREFIX", required=True, help="writes PREFIX.bin and PREFIX.idx")
    build.add_argument("--split-sentences", action="store_true", help="a sequence per sentence, as BERT needs it")
    build.set_defaults(run=_build, command=build)
    tokenizer = data.add_parser("tokenizer", help="train a tokenizer on text files")
    tokenizer.add_argument("--input", metavar="FILE", nargs="+", required=True, help="as for build")
    tokenizer.add_argument("--vocab-size", type=int, required=True, help="entries of the vocabulary")
    tokenizer.add_argument("--kind", choices=("wordpiece", "bpe"), default="wordpiece", help="default wordpiece")
    tokenizer.add_argument("--lowercase", action="store_true", help="lower case, without accents (wordpiece)")
    tokenizer.add_argument("--output", metavar="FILE", required=True, help="writes this tokenizer.json")
    tokenizer.set_defaults(run=_tokenizer, command=tokenizer)
    return parser


def _add_weights(commands: argparse._SubParsersAction) -> None:
    """The commands that take a model that is there already."""
    checkpoint = {"default": "best", "help": "of a run: best, last, or a step (default best)"}
    evaluate = commands.add_parser("eval", help="loss and perplexity of a model on an indexed file")
    evaluate.add_argument(
        "source", metavar="MODEL", type=Path, help="a run folder, a configuration, or a folder of Hugging Face's"
    )
    evaluate.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="overrides, such as trainer.devices=8"
    )
    evaluate.add_argument("--data", metavar="PREFIX", help="an indexed file (default: the configuration's)")
    evaluate.add_argument(
        "--split", help="train, validation or test (default: all of --data, else the validation documents)"
    )
    evaluate.add_argument("--checkpoint", **checkpoint)
    evaluate.add_argument("--json", action="store_true", help="print one JSON object, unrounded")
    evaluate.set_defaults(run=_evaluate, command=evaluate)

    convert = commands.add_parser(
        "convert", help="a run into a folder of Hugging Face's, or such a folder into a configuration"
    )
    convert.add_argument("source", metavar="SOURCE", type=Path, help="a run folder, or a folder with config.json")
    convert.add_argument("output", metavar="OUTPUT", type=Path, help="a new folder, or a new .yaml to train from")
    convert.add_argument("--checkpoint", **checkpoint)
    convert.set_defaults(run=_convert, command=convert)


def _add_plan(commands: argparse._SubParsersAction) -> None:
    plan = commands.add_parser(
        "plan", help="what GPUs would do with a configuration: time, memory, overlap; needs no GPU"
    )
    plan.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/gpt3_1.3b.yaml")
    plan.add_argument(
        "overrides", metavar="key=value", nargs="*", default=[], help="overrides; --sweep leaves these keys alone"
    )
    plan.add_argument("--target", default="h100-sxm-80gb", help="the GPU (default h100-sxm-80gb)")
    plan.add_argument("--devices", type=int, help="GPUs in all (default: what the file says)")
    plan.add_argument("--hosts", type=int, help="machines they stand in (default: what the file says)")
    plan.add_argument("--layout", action="store_true", help="only list which parameter lives where; compiles nothing")
    plan.add_argument("--json", metavar="FILE", help="write the report as JSON; - prints it instead of the table")
    plan.add_argument("--hlo", metavar="FILE", help="write the compiled module, in the order of its schedule")
    plan.add_argument("--quick", action="store_true", help="estimate what advice would give, instead of compiling it")
    plan.add_argument("--sweep", action="store_true", help="compile all layouts that make sense, and rank them")
    plan.add_argument("--results", metavar="FILE", help="where --sweep keeps what it knows (default: the user's cache)")
    plan.add_argument("--workers", type=int, help="layouts that --sweep compiles at a time (default: one per core)")
    plan.add_argument("--write", metavar="FILE", help="write the best layout of --sweep as a configuration")
    plan.set_defaults(run=_plan, command=plan)


def _version() -> str:
    try:
        return version("jzero")
    except PackageNotFoundError:  # run from a checkout
        from jzero import __version__

        return __version__
