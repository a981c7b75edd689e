"""All supported families, in search order."""

from __future__ import annotations

from longctx.families.bart import BART, MARIAN
from longctx.families.bert import ALBERT, BERT, ROBERTA
from longctx.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from longctx.families.gemma import GEMMA2, GEMMA3_TEXT
from longctx.families.gemma4 import GEMMA4_TEXT
from longctx.families.glm import GLM4_MOE
from longctx.families.gpt import GPT1, GPT2
from longctx.families.gpt_oss import GPT_OSS
from longctx.families.granite_hybrid import GRANITE_HYBRID
from longctx.families.imagegpt import IMAGE_GPT
from longctx.families.kimi import KIMI_LINEAR
from longctx.families.llama import GRANITE, LLAMA, MINISTRAL3, MISTRAL, SMOLLM3
from longctx.families.mixtral import MINIMAX_M2, MIXTRAL
from longctx.families.olmo import OLMO2, OLMO3, OLMO_HYBRID
from longctx.families.olmoe import OLMOE
from longctx.families.phi3 import PHI3
from longctx.families.qwen import MIMO, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, SEED_OSS
from longctx.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from longctx.families.spec import Family
from longctx.families.swin import SWIN
from longctx.families.t5 import T5
from longctx.families.vit import VIT

# If several families fit one model, the first is written: the type that most programs support.
_ALL = (
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    SEED_OSS,
    MIMO,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    SMOLLM3,
    GRANITE,
    PHI3,
    OLMO2,
    OLMO3,
    OLMO_HYBRID,
    GLM4_MOE,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    GEMMA2,
    GEMMA3_TEXT,
    GEMMA4_TEXT,
    GPT2,
    GPT1,
    IMAGE_GPT,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_LINEAR,
    GRANITE_HYBRID,
    GPT_OSS,
    BERT,
    ROBERTA,
    ALBERT,
    BART,
    MARIAN,
    T5,
    VIT,
    SWIN,
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in _ALL}
