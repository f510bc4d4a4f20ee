"""The types of transformers that no family computes, each with what it has that is missing."""

from __future__ import annotations

# fmt: off
MISSING: dict[str, str] = {  # a model_type: words for "config.json describes …, which …"
    name: reason
    for reason, names in {
        "shares attention between layers of Mamba": "zamba",
        "shares attention between layers of Mamba-2": "zamba2",
        "has recurrent layers of another kind": "minimax recurrent_gemma rwkv xlstm",
        "has layers of short convolutions": "inkling2_text inkling_text zaya",
        "has two attentions in a layer, and experts that change nothing": "longcat_flash",
        "attends to tokens that an indexer chooses":
            "axk2 deepseek_v32 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text",
        "attends to compressed tokens": "deepseek_v4",
        "has several residual streams": "qwen4_exp qwen4_exp_text",
        "has layers that share keys, and heads of two sizes":
            "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
        "scales residuals by depth": "beam",
        "has more heads in some layers than in others": "laguna",
        "has values of another size than keys": "mimo_v2_flash",
        "has experts of attention heads": "jetmoe",
        "has ternary weights, and norms within layers": "bitnet",
        "subtracts one attention from another": "diffllama",
        "computes its mask from values": "doge",
        "runs its layers in loops": "hrm_text",
        "has layers that only images use": "mllama",
        "reads bytes in patches": "blt",
        "only drafts for another model": "gemma4_assistant gemma4_unified_assistant",
        "is the decoder of an encoder-decoder":
            "bigbird_pegasus blenderbot blenderbot-small mvp plbart prophetnet",
        "has the layers of an encoder that is not computed":
            "bert-generation big_bird data2vec-text electra ernie megatron-bert rembert "
            "roberta-prelayernorm roc_bert roformer xlm-roberta-xl xmod",
        "hears, sees or makes music":
            "git got_ocr2 moshi moss_transcribe_diarize musicgen musicgen_melody trocr whisper",
        "has positions or attention of its own, of before 2022": "cpmant ctrl reformer xlm xlnet",
    }.items()
    for name in names.split()
}
# fmt: on
