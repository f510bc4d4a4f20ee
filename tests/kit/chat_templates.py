"""Chat templates written as published ones are, and what transformers renders with them."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- generation %}{{- (message.content or '') | trim }}{%- endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name + call.function.arguments | tojson(indent=2) }}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA_2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = messages[0]['content'] %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = false %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message %}
        {% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}
        {% set content = message['content'] %}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- set ns = namespace(first=true, n_users=0) %}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string + "<|eot_id|>" }}
{%- for message in messages if message.role != 'debug' %}
    {%- if message.role == 'user' %}{%- set ns.n_users = ns.n_users + 1 %}{%- endif %}
    {%- if ns.n_users > 9 %}{%- break %}{%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- (message['content'] or '') | trim }}
    {%- if message.reasoning_content %}
        {{- '<think>' ~ message.reasoning_content ~ '</think>' }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
PLAIN = """\
{% for message in messages %}
{{ message['role'] | title }}: {{ message['content'] }}
{% endfor %}
{% if add_generation_prompt %}
Assistant:{% endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama 2": LLAMA_2, "llama 3": LLAMA_3, "plain": PLAIN}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def by_transformers(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **TOKENS)
    rendered = tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, **options
    )
    assert isinstance(rendered, str)
    return rendered
